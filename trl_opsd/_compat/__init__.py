"""The only modules that import other trainers and engines, one file or folder each; API changes are absorbed here."""

from trl_opsd._compat.import_noise import drop_import_noise

drop_import_noise()  # before a module of this package imports TRL
