# SGLang's own image with this plugin: docker build --tag sglang-dflash .
# docker run --gpus all --ipc host --publish 30000:30000 sglang-dflash \
#   --model-path Qwen/Qwen3-8B --speculative-draft-model-path z-lab/Qwen3-8B-DFlash-b16
FROM lmsysorg/sglang:v0.5.13.post1

COPY . /opt/sglang-dflash
# The image has SGLang, so nothing but the plugin is installed.
RUN python3 -m pip install --no-cache-dir --no-deps /opt/sglang-dflash

ENTRYPOINT ["python3", "-m", "sglang.launch_server", "--host", "0.0.0.0", "--port", "30000", "--speculative-algorithm", "DFLASH"]
