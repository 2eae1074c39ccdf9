"""The only place where other trainers and engines are imported, one file each; what moves in them is mended here."""
