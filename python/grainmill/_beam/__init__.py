"""Reading and writing ArrayRecord files from Apache Beam."""

try:
    import apache_beam  # noqa: F401 - every module here needs it
except ImportError as failure:
    raise ImportError(
        "`grainmill.beam` needs the package `apache_beam`: pip install 'grainmill[beam]'"
    ) from failure
