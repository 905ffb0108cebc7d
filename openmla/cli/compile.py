"""`openmla doctor --compile`: compile every kernel for real GPUs; works without a GPU."""

from __future__ import annotations

from importlib.util import find_spec

from openmla.cli.terminal import progress
from openmla.errors import UnsupportedError
from openmla.plan.explanation import counted


def run_compile(target: str) -> int:
    """Compile for one target (sm_90) or all of them, and mark kernels that do not fit the chip."""
    if find_spec("triton") is None:
        raise UnsupportedError(
            'doctor: package triton is not installed. pip install "openmla[triton]".'
        )
    from openmla.backends.triton._build import (
        SHARED_MEMORY,
        all_builds,
        compile_build,
        target_name,
    )

    builds = [build for build in all_builds() if target in ("all", target_name(build.capability))]
    print(f"{'kernel':<48} {'target':<7} {'registers':>9} {'spills':>7} {'shared':>7}")
    too_large = 0
    with progress(len(builds)) as advance:
        for number, build in enumerate(builds):
            advance(f"compiling {build.name}", number)
            report = compile_build(build)
            fits = report.shared <= SHARED_MEMORY[build.capability]
            too_large += not fits
            print(
                f"{build.name:<48} {target_name(build.capability):<7} {report.registers:>9} "
                f"{report.spills:>7} {report.shared:>7}{'' if fits else '  exceeds the chip'}"
            )
    print(f"{counted(len(builds), 'kernel')} compiled, {too_large} of them too large for the chip.")
    return 1 if too_large else 0
