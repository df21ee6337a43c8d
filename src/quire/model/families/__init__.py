"""Model families, one file each: a config to a spec, weight names to targets."""
