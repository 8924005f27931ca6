"""The blocks of a modular pipeline: the order in which they run for a request, and the steps of a denoising loop."""

import copy
import inspect
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from diffusers.modular_pipelines import modular_pipeline as _modular_pipeline

from stagemesh.services.engines.diffusion.state import BlockPath

modular_pipeline: Any = _modular_pipeline
"""Untyped, because the attributes of its blocks have no types."""
_COMPOSED = (modular_pipeline.ConditionalPipelineBlocks, modular_pipeline.SequentialPipelineBlocks)


def run_order(block: Any, values: Any, *, after: BlockPath | None = None) -> Iterator[tuple[BlockPath, Any]]:
    """Yields the blocks without sub-blocks and the loops in `block`, each with its path from `block`.

    A conditional block selects its branch when it is reached, by the request's `values` at that time. If `after` is the
    path of a block, only the blocks that follow it are yielded.
    """
    name, rest = (after[0], after[1:]) if after else ("", ())
    if isinstance(block, modular_pipeline.ConditionalPipelineBlocks):
        names = [branch for branch in (name or _selected_branch(block, values),) if branch in block.sub_blocks]
    elif isinstance(block, modular_pipeline.SequentialPipelineBlocks):
        names = list[str](block.sub_blocks)
        names = names[names.index(name) :] if name else names
    else:
        if after is None:
            yield (), block
        return
    for each in names:
        inner = rest if each == name else None
        for path, leaf in run_order(block.sub_blocks[each], values, after=inner):
            yield (each, *path), leaf


def all_leaves(block: Any) -> Iterator[Any]:
    """Yields the blocks without sub-blocks and the loops in `block`, in all branches."""
    if isinstance(block, _COMPOSED):
        for each in block.sub_blocks.values():
            yield from all_leaves(each)
    else:
        yield block


def has_loop(block: Any) -> bool:
    """Returns whether `block` is a loop or contains one."""
    return any(isinstance(leaf, modular_pipeline.LoopSequentialPipelineBlocks) for leaf in all_leaves(block))


def pruned(name: str, block: Any, names: Collection[str]) -> Any:
    """Returns the block `name` without the inner blocks that `names` does not name, or None if nothing remains."""
    if name in names:
        return block
    if not isinstance(block, _COMPOSED):
        return None
    inner = {each: pruned(each, child, names) for each, child in block.sub_blocks.items()}
    kept = {each: child for each, child in inner.items() if child is not None}
    if not kept:
        return None
    copied = copy.copy(block)
    copied.sub_blocks = modular_pipeline.InsertableDict(kept)
    return copied


def is_plain(loop: Any) -> bool:
    """Returns whether each iteration of a loop is one denoising step with the index `i`. The iterations of other loops
    contain a loop themselves.
    """
    return all("i" in inspect.signature(block.__call__).parameters for block in loop.sub_blocks.values())


def block_at(block: Any, path: BlockPath) -> Any:
    """Returns the block at `path` in `block`. Raises KeyError if there is none."""
    for name in path:
        block = block.sub_blocks[name]
    return block


def plan_steps(loop: Any, view: Any, values: Any, state: Any = None) -> tuple[Any, list[dict[str, Any]]]:
    """Runs a loop's own code without the blocks of its steps.

    Returns the loop's variables before the first step, and the arguments of each step. `state` contains the variables
    if the loop has already begun.
    """
    steps: list[dict[str, Any]] = []

    def note(components: Any, block_state: Any, **step: Any) -> tuple[Any, Any]:
        steps.append(step)
        return components, block_state

    def end(_values: Any, block_state: Any) -> None:
        begun.append(block_state)

    def resume(_values: Any) -> Any:
        return modular_pipeline.BlockState(**state.as_dict())

    begun: list[Any] = []
    planned = copy.copy(loop)
    planned.loop_step, planned.set_block_state = note, end
    planned.set_progress_bar_config(disable=True)
    if state is not None:
        planned.get_block_state = resume
    planned(view, values)
    return begun[0], steps


def sequence(blocks: Mapping[str, Any]) -> Any:
    """Returns a block that runs `blocks` in order."""
    return modular_pipeline.SequentialPipelineBlocks.from_blocks_dict(dict(blocks))


def frozen(block: Any) -> Any:
    """Returns a copy of `block` whose declarations are constants. diffusers computes them at every access."""
    copied = copy.copy(block)
    freeze_properties(
        copied,
        inputs=[copy.copy(param) for param in block.inputs],
        intermediate_outputs=[copy.copy(param) for param in block.intermediate_outputs],
    )
    return copied


def freeze_properties(owner: Any, **values: object) -> None:
    """Replaces properties of `owner` with constants. `values` contains the constants, by property name."""
    kind: Any = owner.__class__
    owner.__class__ = type(kind.__name__, (kind,), values)


def _selected_branch(block: Any, values: Any) -> str:
    """Returns the name of the branch that runs, or "" if none does."""
    triggers = {name: values.get(name) for name in block.block_trigger_inputs if name is not None}
    return str(block.select_block(**triggers) or block.default_block_name or "")
