"""Engine ``kernel``: memories that store associations, by one of several methods; see `engine`."""
