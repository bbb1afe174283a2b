"""The compiled module fits one minor version of torch: C++ classes change their layout between minors."""

from __future__ import annotations


def minor_version(version: str) -> str:
    """ "2.13.0+cpu" -> "2.13"."""
    return ".".join(version.split("+")[0].split(".")[:2])


def check_torch(running: str) -> None:
    """ImportError when the extension module was built for another torch than the one that runs."""
    try:
        from tessera import _core
    except ImportError as error:
        raise ImportError(
            f"[tessera] cannot load the compiled module tessera._core with torch {running}: {error}. "
            "Build Tessera in this environment: pip install . --no-build-isolation"
        ) from error
    built = _core.torch_version
    if minor_version(built) != minor_version(running):
        raise ImportError(
            f"[tessera] built for torch {minor_version(built)} ({built}), but torch {running} is installed. "
            "Build Tessera again in this environment: pip install . --no-build-isolation"
        )
