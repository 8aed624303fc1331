"""The generated parts of docs/: each lies between `<!-- generated: NAME -->` and `<!-- end of NAME -->`."""
