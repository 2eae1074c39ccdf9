"""The only modules that import other trainers and engines, one file or folder each; API changes are absorbed here."""
