"""`openmla doctor --compile`: every kernel for real GPUs, on a machine that needs none."""

from __future__ import annotations

import sys
from importlib.util import find_spec

from openmla.errors import ConfigError, UnsupportedError


def run_compile(target: str) -> int:
    """Compile for one target (sm_90) or all of them; what does not fit its chip is said so."""
    if find_spec("triton") is None:
        raise UnsupportedError('doctor: --compile needs triton: pip install "openmla[triton]".')
    from openmla.backends.triton._build import (
        SHARED_MEMORY,
        all_builds,
        compile_build,
        target_name,
    )

    wanted = [target_name(capability) for capability in SHARED_MEMORY]
    if target not in ("all", *wanted):
        raise ConfigError(f"doctor: --compile must be all or {', '.join(wanted)}, got {target!r}.")
    builds = [build for build in all_builds() if target in ("all", target_name(build.capability))]
    print(f"{'kernel':<48} {'target':<7} {'registers':>9} {'spills':>7} {'shared':>7}")
    too_large = 0
    for number, build in enumerate(builds):
        if sys.stderr.isatty():
            print(f"\r{number + 1} of {len(builds)} ", end="", file=sys.stderr, flush=True)
        report = compile_build(build)
        fits = report.shared <= SHARED_MEMORY[build.capability]
        too_large += not fits
        print(
            f"{build.name:<48} {target_name(build.capability):<7} {report.registers:>9} "
            f"{report.spills:>7} {report.shared:>7}{'' if fits else '  more than the chip has'}"
        )
    print(f"{len(builds)} kernels compiled, {too_large} of them too large.")
    return 1 if too_large else 0
