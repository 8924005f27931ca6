from importlib.metadata import entry_points

from stagemesh.services.engines.torch_setup import declare_operators


def test_vllm_declares_the_operators_and_does_not_take_them_for_a_platform() -> None:
    (entry,) = entry_points(group="vllm.platform_plugins", name="stagemesh_torchvision")
    assert entry.load() is declare_operators
    declared: object = entry.load()()
    assert declared is None
