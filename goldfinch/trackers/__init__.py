"""What follows a run: the terminal, and libraries that log its numbers, chosen by conf/tracker/."""
