"""Flags of the objectives: the fields of each one in `OBJECTIVES` become `--{name}-{field}`, with type, default and help.

Invariants: a loss added to the registry has its flags without a line here; only the chosen loss's hyper-parameters are
in the parsed arguments, and a flag of another loss is an error; what the loss refuses is reported in terms of the flag.
"""

import argparse
import dataclasses
import re
import typing
from typing import Any

from relax.command import Group, number
from relax.errors import UserError
from relax.objectives import OBJECTIVES, Objective


def add_objective_flags(group: Group) -> None:
    """Add every loss's flags. Each is None unless given, so that a flag of another loss can be told."""
    for name, loss in OBJECTIVES.items():
        kinds = typing.get_type_hints(loss)
        for field in _fields(loss):
            kind, text = kinds[field.name], f"{name}: {field.metadata['help']}"
            if kind is bool:
                action = argparse.BooleanOptionalAction if field.default else "store_true"
                group.other(_flag(name, field.name), default=None, action=action, help=text)
            else:
                options = _value_options(kind)
                group.other(_flag(name, field.name), default=None, help=f"{text} (default: {field.default})", **options)


def settle_objective(args: argparse.Namespace) -> None:
    """Give the chosen loss's flags their defaults and try the loss, refuse the other losses' flags or forget them."""
    for name, loss in OBJECTIVES.items():
        for field in _fields(loss):
            dest = f"{name}_{field.name}"
            given = getattr(args, dest) is not None
            if name == args.loss_type:
                setattr(args, dest, getattr(args, dest) if given else field.default)
            elif given:
                flag = _flag(name, field.name)
                raise UserError(f"{flag} belongs to --loss-type {name}, but this run has --loss-type {args.loss_type}")
            else:
                delattr(args, dest)
    build_objective(args)


def build_objective(args: argparse.Namespace) -> Objective:
    """The loss that `args` describe. Raises UserError, in terms of flags, for a value that the loss refuses."""
    name, loss = args.loss_type, OBJECTIVES[args.loss_type]
    values = {field.name: getattr(args, f"{name}_{field.name}") for field in _fields(loss)}
    try:
        return loss(**values)
    except ValueError as error:
        message = str(error)
        for field in values:
            message = re.sub(rf"\b{field}\b", _flag(name, field), message, count=1)
        raise UserError(message) from None


def _fields(loss: type[Objective]) -> tuple["dataclasses.Field[Any]", ...]:
    return dataclasses.fields(typing.cast(Any, loss))  # a protocol cannot promise that its classes are dataclasses


def _flag(name: str, field: str) -> str:
    return f"--{name}-{field}".replace("_", "-")


def _value_options(kind: Any) -> dict[str, Any]:
    if typing.get_origin(kind) is typing.Literal:
        return {"choices": list(typing.get_args(kind))}
    if kind in (int, float):
        return {"type": number(kind), "metavar": "X"}
    if kind is str:
        return {"metavar": "TEXT"}
    raise TypeError(f"a loss's hyper-parameter of type {kind} has no flag: use bool, int, float, str or Literal")
