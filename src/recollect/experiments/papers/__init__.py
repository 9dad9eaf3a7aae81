"""The figures and tables of the papers, one package per paper."""
