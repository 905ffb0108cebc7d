"""Scripts for people who work on the project; not part of the package."""
