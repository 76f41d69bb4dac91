"""Reports and findings in words and as JSON data: every sentence once, whoever says it."""
