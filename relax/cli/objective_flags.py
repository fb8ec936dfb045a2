"""Flags of the objectives: the fields of each one in `OBJECTIVES` become `--{name}-{field}`, with type, default and help.

Invariants: a loss added to the registry has its flags without a line here; only the chosen loss's hyper-parameters are
in the parsed arguments, and a flag of another loss is an error; what the loss refuses is reported in terms of the flag.
"""

import argparse
import dataclasses
import re
import types
import typing
from typing import Any

from relax.cli.command import Group, number
from relax.errors import UserError
from relax.objectives import OBJECTIVES, Objective, Scores


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
                default = f" (default: {field.default})" if field.default is not None else ""
                group.other(_flag(name, field.name), default=None, help=text + default, **_value_options(kind))


def settle_objective(args: argparse.Namespace) -> None:
    """Give the chosen objective's flags the values that it takes, refuse the other objectives' flags or forget them."""
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
    objective = build_objective(args)
    for field in _fields(type(objective)):  # an objective may settle defaults that depend on other hyper-parameters
        setattr(args, f"{args.loss_type}_{field.name}", getattr(objective, field.name))


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


def loss_flag(objective: Objective) -> str:
    """The flag, with its value, that chooses what the objective computes."""
    name = next(name for name, loss in OBJECTIVES.items() if type(objective) is loss)
    loss = getattr(objective, "loss", None)
    return f"--loss-type {name}" if loss is None else f"{_flag(name, 'loss')} {loss}"


def _fields(loss: type[Objective]) -> tuple["dataclasses.Field[Any]", ...]:
    return dataclasses.fields(typing.cast(Any, loss))  # a protocol cannot promise that its classes are dataclasses


def _flag(name: str, field: str) -> str:
    return f"--{name}-{field}".replace("_", "-")


def explain(objective: Objective) -> str:
    """What the objective is, in its own words, and its loss at the first step."""
    now, later = (_first_loss(objective, nats_per_token=nats) for nats in (-2.0, -1.0))
    known = f"{now:.9g}" if now == later else f"{now:.9g} at -2 nats a token, {later:.9g} at -1, over 5 and 10 tokens"
    equal = "policy equal to its reference" if objective.needs_reference else "completions equally likely, or equal rewards"
    values = {field.name: getattr(objective, field.name) for field in _fields(type(objective))}
    settings = ", ".join(f"{name} {value}" for name, value in values.items() if value is not None)
    lines = [objective.explain(), f"  {settings}"] if settings else [objective.explain()]
    return "\n".join([*lines, "  a step's loss is the mean over the pairs of its global batch", f"  {equal}: {known}"])


def _first_loss(objective: Objective, *, nats_per_token: float) -> float:
    import torch

    lengths = torch.tensor([5.0, 10.0], dtype=torch.float64)
    values = lengths * nats_per_token if objective.head == "lm" else torch.zeros(2, dtype=torch.float64)
    columns = {name: torch.ones(1, dtype=torch.float64) for name in objective.requires}
    scores = Scores(
        values, lengths, torch.zeros(2, dtype=torch.int64), reference=values, columns=columns, state=objective.initial_state
    )
    return objective(scores)[0].item()


def _value_options(kind: Any) -> dict[str, Any]:
    if typing.get_origin(kind) in (typing.Union, types.UnionType):  # None: the objective settles it
        (kind,) = (part for part in typing.get_args(kind) if part is not types.NoneType)
    if typing.get_origin(kind) is typing.Literal:
        return {"choices": list(typing.get_args(kind))}
    if kind in (int, float):
        return {"type": number(kind), "metavar": "X"}
    if kind is str:
        return {"metavar": "TEXT"}
    raise TypeError(f"a loss's hyper-parameter of type {kind} has no flag: use bool, int, float, str or Literal")
