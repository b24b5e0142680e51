"""Tools for the maintainers of the patches; not part of the package that is installed."""
