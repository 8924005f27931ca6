"""How many processes a stage computes in, and what each does. Imports nothing of torch."""

from dataclasses import dataclass
from typing import ClassVar

from pydantic import ConfigDict


@dataclass(frozen=True)
class ParallelOptions:
    """Of the denoising; with 1 each the stage computes in its own process."""

    __pydantic_config__: ClassVar = ConfigDict(extra="forbid")

    cfg: int = 1
    """2 computes both branches of classifier-free guidance at once, each in processes of its own."""
    ulysses: int = 1
    """Processes that share each forward: every one has a part of the tokens, and of the heads during attention."""
    hsdp: int = 1
    """Processes that share the transformer's weights: each keeps a part, and fetches a block's rest when it is due."""

    def __post_init__(self) -> None:
        for name in ("cfg", "ulysses", "hsdp"):
            if getattr(self, name) < 1:
                raise ValueError(f"parallel.{name} is {getattr(self, name)}; it must be at least 1")
        if self.cfg > _BRANCHES:
            raise ValueError(f"parallel.cfg is {self.cfg}; guidance has {_BRANCHES} branches, so it must be 1 or 2")
        if self.ulysses > 1 and self.ulysses % self.hsdp:
            raise ValueError(
                f"parallel.hsdp is {self.hsdp}; beside ulysses {self.ulysses} it must divide that, as those share the "
                "weights that compute the same branch"
            )

    @property
    def branch_ranks(self) -> int:
        """Processes that compute one branch of guidance."""
        return max(self.ulysses, self.hsdp)

    @property
    def ranks(self) -> int:
        """Processes in all."""
        return self.cfg * self.branch_ranks


_BRANCHES = 2
