"""Target families, one file each, behind `protocols.Target`."""
