"""Who holds what of a tensor: meshes, placements, layout files, and how pieces make the whole."""
