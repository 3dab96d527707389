"""Which linears of a model multiply in fp8, in a sentence; what cannot is named, and a model without any is refused."""

import re
from typing import Any

import pytest
import torch
from support.models import tiny
from transformers import AfmoeForCausalLM

from hf_helix.config import HelixConfig
from hf_helix.engine.cut.build import cut_units
from hf_helix.engine.cut.float8 import check_float8, describe_float8
from hf_helix.models.registry import family_of
from hf_helix.models.small_config import default_config
from hf_helix.models.stock.peft import base_of
from hf_helix.runtime.distributed.mesh import mesh_of

WIDE = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}


def described(made: Any = None, **model: Any) -> str:
    made = made or tiny(**model)
    layers = list(family_of(base_of(made)).layers(base_of(made)))
    rank_units = cut_units(
        made, HelixConfig(float8=True), mesh_of(HelixConfig(), "cpu"), ["none"] * len(layers)
    ).rank_units
    return describe_float8(rank_units.all_units.values(), "tensorwise", torch.device("cpu"))


def test_all_but_the_head() -> None:
    said = described(**WIDE)
    assert said.startswith("float8=tensorwise: 14 linears of this rank multiply in fp8, ")
    assert "; not in fp8: 1 (the head or a router); emulated on this CPU" in said


def test_experts_and_adapters_stay() -> None:
    assert re.search(r"; not in fp8: (.*; )?\d+ \(experts\)", described(family="phimoe", **WIDE))
    with pytest.raises(
        ValueError, match=r"float8='tensorwise': no linear .* can multiply in fp8: 14 \(adapters\).*float8=None"
    ):
        described(lora={}, **WIDE)


@pytest.mark.slow
def test_routers_stay() -> None:
    """Those of AFMoE are linears."""
    config = default_config("AfmoeForCausalLM", 2)
    config.num_experts = 16
    model = AfmoeForCausalLM(config)
    routers = [name for name, _ in model.named_parameters() if name.endswith("router.gate.weight")]
    assert f" {len(routers) + 1} (the head or a router)" in described(model)


def test_sizes_that_16_does_not_divide_stay() -> None:
    said = described(**{**WIDE, "intermediate_size": 72})
    assert said.startswith("float8=tensorwise: 8 linears ")
    assert "6 (sizes that 16 does not divide)" in said


@pytest.mark.parametrize(("capability", "hip"), [((8, 6), None), ((7, 5), None), ((9, 4), "6.2")], ids=str)
def test_devices_without_such_products_are_refused(
    capability: tuple[int, int], hip: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "the device")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.version, "hip", hip)
    cuda = torch.device("cuda", 0)
    said = rf"float8='rowwise' on the device \(compute capability {capability[0]}.{capability[1]}\): .* use float8=None"
    with pytest.raises(ValueError, match=said):
        check_float8("rowwise", cuda)
    check_float8(None, cuda)
    check_float8("rowwise", torch.device("cpu"))
    monkeypatch.setattr(torch.version, "hip", None)
    for newer in ((8, 9), (12, 0)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, newer=newer: newer)
        check_float8("rowwise", cuda)


def test_the_option() -> None:
    given = {True: "tensorwise", False: None, None: None, "rowwise": "rowwise"}
    assert {each: HelixConfig(float8=each).float8 for each in given} == given
    said = r"float8='rowise' is unknown; use one of tensorwise, rowwise .did you mean 'rowwise'"
    with pytest.raises(ValueError, match=said):
        HelixConfig(float8="rowise")
    with pytest.raises(
        TypeError, match="float8 must be a string, such as float8='rowwise', true for 'tensorwise', or None"
    ):
        HelixConfig(float8=8)  # type: ignore[arg-type]
