"""Benchmarks, one file per op: `openmla bench <op>`. A number is a ratio inside one run."""
