"""The ring in virtual time: what a split and an eta give, before they cost anything."""
