"""What has to hold on a host before a job can be traced there: one condition, one line."""
