"""Fault schedules: jobs whose processes, disks and links fail, and what of them is in the tree."""
