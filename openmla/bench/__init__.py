"""Benchmarks, one file per op: `openmla bench <op>`. Results are ratios within one run."""
