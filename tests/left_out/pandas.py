"""Stands for a package that Beam and Keras can do without, and take half a second to import."""

raise ImportError
