"""Engine ``deep``: memories made of linear maps, by coefficient matrices; see `engine`."""
