"""Pages, driven in browsers as people drive them."""
