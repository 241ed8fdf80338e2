// What GitOps tools make of objects, by their own libraries: a question as JSON on stdin, the answers as JSON on stdout.
package main

import (
	"context"
	"encoding/json"
	"fmt"
	"os"

	"github.com/fluxcd/pkg/apis/kustomize"
	fluxcel "github.com/fluxcd/pkg/runtime/cel"
	lua "github.com/yuin/gopher-lua"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/util/jsonmergepatch"
	luajson "layeh.com/gopher-json"
	"sigs.k8s.io/cli-utils/pkg/kstatus/status"
)

const applied = "kubectl.kubernetes.io/last-applied-configuration"

type question struct {
	Objects []*unstructured.Unstructured     `json:"objects"`
	Lua     string                           `json:"lua"`
	Flux    kustomize.HealthCheckExpressions `json:"flux"`
	// Manifests are compared with the objects of the same place.
	Manifests []*unstructured.Unstructured `json:"manifests"`
}

type answer struct {
	Kstatus []string          `json:"kstatus"`
	Argo    []string          `json:"argo"`
	Flux    []string          `json:"flux"`
	Patches []json.RawMessage `json:"patches"`
}

func main() {
	var asked question
	must(json.NewDecoder(os.Stdin).Decode(&asked))
	said := answer{}
	for number, object := range asked.Objects {
		found, err := status.Compute(object)
		must(err)
		said.Kstatus = append(said.Kstatus, string(found.Status))
		if asked.Lua != "" {
			said.Argo = append(said.Argo, argo(asked.Lua, object))
		}
		if asked.Flux.Current != "" {
			said.Flux = append(said.Flux, flux(asked.Flux, object))
		}
		if number < len(asked.Manifests) {
			said.Patches = append(said.Patches, patch(asked.Manifests[number], object))
		}
	}
	must(json.NewEncoder(os.Stdout).Encode(said))
}

// argo runs a health check as Argo CD does: no library but Lua's base, the object as `obj`, a table as the answer.
func argo(script string, object *unstructured.Unstructured) string {
	state := lua.NewState(lua.Options{SkipOpenLibs: true})
	defer state.Close()
	must(state.CallByParam(lua.P{Fn: state.NewFunction(lua.OpenBase), Protect: true}, lua.LString(lua.BaseLibName)))
	state.SetGlobal("obj", luajson.DecodeValue(state, object.Object))
	must(state.DoString(script))
	table, isTable := state.Get(-1).(*lua.LTable)
	if !isTable {
		must(fmt.Errorf("the script must return a table, got %v", state.Get(-1)))
	}
	return table.RawGetString("status").String()
}

func flux(expressions kustomize.HealthCheckExpressions, object *unstructured.Unstructured) string {
	evaluator, err := fluxcel.NewStatusEvaluator(&expressions)
	must(err)
	found, err := evaluator.Evaluate(context.Background(), object)
	must(err)
	return string(found.Status)
}

// patch is what a client-side apply would send; Argo CD shows the same as a difference. {} is none.
func patch(manifest, object *unstructured.Unstructured) json.RawMessage {
	original := object.GetAnnotations()[applied]
	annotations := manifest.GetAnnotations()
	if annotations == nil {
		annotations = map[string]string{}
	}
	annotations[applied] = original
	manifest.SetAnnotations(annotations)
	modified, err := manifest.MarshalJSON()
	must(err)
	live, err := object.MarshalJSON()
	must(err)
	found, err := jsonmergepatch.CreateThreeWayJSONMergePatch([]byte(original), modified, live)
	must(err)
	return found
}

func must(err error) {
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}
