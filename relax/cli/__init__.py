"""What commands share: the parser, training's flags, the rules across flags, and the way from flags to parameters."""
