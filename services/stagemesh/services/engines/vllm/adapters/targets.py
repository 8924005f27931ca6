"""Reports the sizes of the layers that a LoRA adapter can change. Runs in vLLM's workers (`worker_extension_cls`)."""

from typing import Any

from vllm.lora.utils import parse_fine_tuned_lora_name


class AdapterTargets:
    """A mixin for vLLM's worker class. The replica calls `adapter_targets` through vLLM's `collective_rpc`."""

    def adapter_targets(self, names: list[str]) -> dict[str, list[int]]:
        """Returns the sizes of the layers in `names` that this worker has, by layer name.

        Layer names are PEFT's names. A size is [inputs, outputs], the total numbers over all ranks. The list is empty
        for a layer of unknown size. vLLM itself checks such a layer when it loads the adapter.
        """
        worker: Any = self
        manager = worker.model_runner.lora_manager._adapter_manager  # noqa: SLF001  # vLLM has no public accessor
        mapper = getattr(manager.model, "hf_to_vllm_mapper", None)
        renaming = None if mapper is None else mapper.get_rename_mapper()
        sizes = _sizes(manager)
        targets: dict[str, list[int]] = {}
        for name in names:
            own_name, _ = parse_fine_tuned_lora_name(f"{name}.lora_A.weight", renaming)
            if own_name in sizes:
                targets[name] = sizes[own_name]
        return targets


def _sizes(manager: Any) -> dict[str, list[int]]:
    """Returns a dict from layer names to layer sizes, [inputs, outputs].

    A layer that packs several projections, such as q, k and v, has one dict entry for each projection.
    """
    sizes: dict[str, list[int]] = {}
    for name, module in manager.modules.items():
        layer = module.base_layer
        parts: list[str] = manager.packed_modules.get(name, [])
        outputs = _outputs(layer, len(parts) or 1)
        for number, part in enumerate(parts or [name]):
            sizes[part] = [layer.input_size, outputs[number]] if outputs else []
    return sizes


def _outputs(layer: Any, parts: int) -> list[int]:
    if not hasattr(layer, "input_size"):
        return []
    if parts == 1:
        return [layer.output_size]
    if hasattr(layer, "total_num_kv_heads"):
        # The layer's own output_sizes count replicated key and value heads once per rank.
        heads = [layer.total_num_heads, layer.total_num_kv_heads, layer.total_num_kv_heads]
        widths = [layer.head_size, layer.head_size, getattr(layer, "v_head_size", layer.head_size)]
        outputs = [count * width for count, width in zip(heads, widths, strict=True)]
    else:
        outputs = list(getattr(layer, "output_sizes", []))
    return outputs if len(outputs) == parts else []
