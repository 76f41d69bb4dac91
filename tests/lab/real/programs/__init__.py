"""The programs, by what they are built of; `setup.is_faulty` switches the bug on."""
