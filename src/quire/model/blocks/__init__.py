"""The blocks that decoder layers are made of, and the stages that run them."""
