"""Programs that an outsider chose, right and with one mistake each."""
