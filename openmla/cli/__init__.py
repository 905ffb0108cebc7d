"""The `openmla` command."""
