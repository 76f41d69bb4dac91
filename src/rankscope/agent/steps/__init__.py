"""Steps in a rank: when one begins and ends, which are traced, and what optimizers do in them."""
