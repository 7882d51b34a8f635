"""Where the rows of a run go besides its own files: one small file per tracker, chosen by conf/tracker/."""
