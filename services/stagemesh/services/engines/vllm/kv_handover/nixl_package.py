"""Makes the nixl library importable under the name that vLLM uses.

vLLM imports `nixl`, a package of a few files that chooses the library for the CUDA version of torch. Without it, the
library that is installed for the connector `nixl` is used.
"""

import importlib
import importlib.util
import sys

_NIXL = "nixl"
_LIBRARIES = ("nixl_cu13", "nixl_cu12")
_SUBMODULES = ("_bindings", "_api")


def provide_nixl() -> None:
    """Imports the package `nixl`, or gives the installed library its name. Raises ImportError if there is no library.

    The package raises ImportError if the library for the CUDA version of torch is missing. The other library then
    transfers host memory, but no memory of a GPU.
    """
    if _NIXL in sys.modules:
        return
    try:
        importlib.import_module(_NIXL)
    except ImportError:
        library = _find_library()
        for name in _SUBMODULES:
            sys.modules[f"{_NIXL}.{name}"] = importlib.import_module(f"{library}.{name}")
        sys.modules[_NIXL] = importlib.import_module(library)


def _find_library() -> str:
    for name in _LIBRARIES:
        if importlib.util.find_spec(name) is not None:
            return name
    raise ModuleNotFoundError(f"No module named {_LIBRARIES[-1]!r}", name=_LIBRARIES[-1])
