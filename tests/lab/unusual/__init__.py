"""Programs of unusual but legitimate kinds, mistakes in them, and an independent proof of both."""
