"""Sources of other formats and packages, and the paths that all sources take."""
