"""The commands of `tidemill pipeline`: one module per subject."""
