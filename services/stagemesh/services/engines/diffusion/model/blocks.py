"""The blocks of a modular pipeline: the order in which they run for a request, and the steps of a denoising loop."""

import copy
import inspect
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from diffusers.modular_pipelines.modular_pipeline import (
    BlockState,
    ConditionalPipelineBlocks,
    LoopSequentialPipelineBlocks,
    SequentialPipelineBlocks,
)
from diffusers.modular_pipelines.modular_pipeline_utils import InsertableDict

from stagemesh.services.engines.diffusion.state import BlockPath


def run_order(block: Any, values: Any, *, after: BlockPath | None = None) -> Iterator[tuple[BlockPath, Any]]:
    """Yields the blocks without sub-blocks and the loops in `block`, each with its path from `block`.

    A conditional block selects its branch when it is reached, by the request's `values` at that time. If `after` is the
    path of a block, only the blocks that follow it are yielded.
    """
    name, *rest = after or (None,)
    if isinstance(block, ConditionalPipelineBlocks):
        chosen = name or _selected_branch(block, values)
        names = [chosen] if chosen in block.sub_blocks else []
    elif isinstance(block, SequentialPipelineBlocks):
        names = list(block.sub_blocks)
        names = names[names.index(name) :] if name else names
    else:
        if after is None:
            yield (), block
        return
    for each in names:
        inner = tuple(rest) if each == name else None
        for path, leaf in run_order(block.sub_blocks[each], values, after=inner):
            yield (each, *path), leaf


def all_leaves(block: Any) -> Iterator[Any]:
    """Yields the blocks without sub-blocks and the loops in `block`, in all branches."""
    if isinstance(block, ConditionalPipelineBlocks | SequentialPipelineBlocks):
        for each in block.sub_blocks.values():
            yield from all_leaves(each)
    else:
        yield block


def has_loop(block: Any) -> bool:
    """Returns whether `block` is a loop or contains one."""
    return any(isinstance(leaf, LoopSequentialPipelineBlocks) for leaf in all_leaves(block))


def pruned(name: str, block: Any, names: Collection[str]) -> Any:
    """Returns the block `name` without the inner blocks that `names` does not name, or None if nothing remains."""
    if name in names:
        return block
    if not isinstance(block, ConditionalPipelineBlocks | SequentialPipelineBlocks):
        return None
    inner = {each: pruned(each, child, names) for each, child in block.sub_blocks.items()}
    kept = {each: child for each, child in inner.items() if child is not None}
    if not kept:
        return None
    copied = copy.copy(block)
    copied.sub_blocks = InsertableDict(kept)
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

    begun: list[Any] = []
    planned = copy.copy(loop)
    planned.loop_step = note
    planned.set_block_state = lambda _values, block_state: begun.append(block_state)
    planned.set_progress_bar_config(disable=True)
    if state is not None:
        planned.get_block_state = lambda _values: BlockState(**state.as_dict())
    planned(view, values)
    return begun[0], steps


def sequence(blocks: Mapping[str, Any]) -> Any:
    """Returns a block that runs `blocks` in order."""
    return SequentialPipelineBlocks.from_blocks_dict(dict(blocks))


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


def _selected_branch(block: Any, values: Any) -> str | None:
    triggers = {name: values.get(name) for name in block.block_trigger_inputs if name is not None}
    branch: str | None = block.select_block(**triggers) or block.default_block_name
    return branch
