"""Line-ups of impostors, one a chapter."""
