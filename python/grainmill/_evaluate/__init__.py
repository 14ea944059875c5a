"""Random-access plans over blocks of positions."""
