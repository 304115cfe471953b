"""Settings of torch in a trial."""

import torch

from raymm.actors.probe.plain_torch import plain_torch


def test_settings_of_a_users_program_do_not_matter():
    weight = torch.ones(2, 2, requires_grad=True)
    with torch.inference_mode(), torch.device("meta"), torch.autocast("cpu", torch.bfloat16):
        assert torch.zeros(1).is_meta
        with plain_torch():
            product = weight @ torch.ones(2, 2)
            assert product.dtype == torch.float32 and product.requires_grad
            assert not product.is_inference() and product.device.type == "cpu"
        assert torch.zeros(1).is_meta and not torch.is_grad_enabled()
    product.sum().backward()
    assert torch.equal(weight.grad, torch.full((2, 2), 2.0))
