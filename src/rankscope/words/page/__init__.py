"""The page: one HTML file of a trace, or of two, and the same page beside a running job."""
