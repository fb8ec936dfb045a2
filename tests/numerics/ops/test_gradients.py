"""Gradients that go straight into megatron's fp32 buffers."""

import torch

from relax.backend.ops.gradients import into_buffer


def test_an_embeddings_gradient_is_summed_in_its_fp32_buffer() -> None:
    generator = torch.Generator().manual_seed(0)
    values, grad = (torch.randn(n, 8, generator=generator).bfloat16() for n in (4, 600))
    ids = torch.arange(600)[None] % 3  # in bf16 a sum of 200 would lose digits
    weight = torch.nn.Parameter(values)
    embed = into_buffer(torch.nn.functional.embedding)
    assert torch.equal(embed(ids, weight), values[ids])  # without a buffer torch's own
    weight.main_grad = torch.ones(4, 8)
    out = embed(ids, weight)
    assert torch.equal(out, values[ids])
    out[0, 0] = 0  # as megatron does with ids of other ranks
    grad[0] = 0
    out.backward(grad[None])
    expected = torch.ones(4, 8).index_add(0, ids[0], grad.float())
    torch.testing.assert_close(weight.main_grad, expected, rtol=1e-6, atol=1e-6)
    assert weight.grad is not None and weight.grad_added_to_main_grad  # what megatron asks
