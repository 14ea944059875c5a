"""Names that known programs import from private modules of Grain; nothing here uses them."""
