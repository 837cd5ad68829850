package core_test

import (
	"encoding/json"
	"errors"
	"go/ast"
	"go/parser"
	"go/token"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// layers is the table of design.md: a package imports only packages of its own layer and of those below. A folder
// covers the folders inside it unless they have a line of their own.
var layers = map[string]int{
	"tqerr": 0, "schema": 0, "internal": 0, "guard": 0,
	"wire": 1, "catalog": 1, "arena": 1, "store": 1, "merge": 1, "jobs": 1, "foreign": 1, "journal": 1,
	"transport": 2, "sampler": 2, "snapshot": 2,
	"controller": 3, "unit": 3, "client": 3, "drain": 3,
	"session": 4,
	// A program that writes tables of several layers; nothing can import it.
	"internal/gen": 5,
}

const module = "transferqueue/"

// layerOf finds the line of a package; -1 when it has none.
func layerOf(path string) int {
	for name := strings.TrimPrefix(path, module+"core/"); name != "."; name = filepath.Dir(name) {
		if layer, ok := layers[name]; ok {
			return layer
		}
	}
	return -1
}

// goPackage is what `go list -json` says about a package.
type goPackage struct {
	ImportPath string
	Imports    []string
	Deps       []string
}

// test tells packages that exist for tests: whatever imports testing.
func (p goPackage) test() bool { return slices.Contains(p.Imports, "testing") }

func corePackages(t *testing.T) (list []goPackage) {
	cmd := exec.Command("go", "list", "-json=ImportPath,Imports,Deps", "./...")
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	cmd.Stderr = os.Stderr
	out, err := cmd.Output()
	require.NoError(t, err)
	for d := json.NewDecoder(strings.NewReader(string(out))); ; {
		var p goPackage
		err := d.Decode(&p)
		if errors.Is(err, io.EOF) {
			require.NotEmpty(t, list)
			return list
		}
		require.NoError(t, err)
		if p.ImportPath != module+"core" { // this test
			list = append(list, p)
		}
	}
}

// upward lists the imports of a package that its layer does not allow.
func upward(p goPackage) (found []string) {
	own := layerOf(p.ImportPath)
	if own < 0 {
		return []string{p.ImportPath + " has no line in the table of layers"}
	}
	for _, path := range p.Imports {
		if !strings.HasPrefix(path, module) {
			continue
		}
		if layer := layerOf(path); !strings.HasPrefix(path, module+"core/") || layer < 0 || layer > own {
			found = append(found, p.ImportPath+" imports "+path)
		}
	}
	return found
}

func TestImportsPointDownward(t *testing.T) {
	for _, p := range corePackages(t) {
		require.Empty(t, upward(p))
	}
	require.NotEmpty(t, upward(goPackage{ImportPath: module + "core/wire", Imports: []string{module + "core/transport/local"}}))
	require.NotEmpty(t, upward(goPackage{ImportPath: module + "core/schema", Imports: []string{module + "core/wire"}}))
	require.NotEmpty(t, upward(goPackage{ImportPath: module + "core/session", Imports: []string{module + "capi"}}))
	require.NotEmpty(t, upward(goPackage{ImportPath: module + "core/common"}))
	require.Empty(t, upward(goPackage{ImportPath: module + "core/store/memtier", Imports: []string{module + "core/arena", "fmt"}}))
}

// os/signal takes Ctrl-C away from Python, and testing in the library would register its flags.
func TestTheLibraryDoesNotContain(t *testing.T) {
	for _, p := range corePackages(t) {
		if p.test() {
			continue
		}
		for _, banned := range []string{"os/signal", "testing"} {
			require.NotContains(t, p.Deps, banned, p.ImportPath)
		}
	}
}

// source is one parsed Go file of the repository.
type source struct {
	path string // from the root, with slashes
	file *ast.File
	set  *token.FileSet
}

func (s source) imports(path string) bool {
	return slices.ContainsFunc(s.file.Imports, func(i *ast.ImportSpec) bool { return i.Path.Value == `"`+path+`"` })
}

// bareGo returns the places of go statements.
func (s source) bareGo() (places []string) {
	ast.Inspect(s.file, func(n ast.Node) bool {
		if g, ok := n.(*ast.GoStmt); ok {
			places = append(places, s.set.Position(g.Pos()).String())
		}
		return true
	})
	return places
}

// sources parses every Go file of the repository, whatever its build tags.
func sources(t *testing.T) (list []source) {
	err := filepath.WalkDir("..", func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if d.IsDir() && strings.HasPrefix(d.Name(), ".") && d.Name() != ".." {
			return fs.SkipDir
		}
		if d.IsDir() || !strings.HasSuffix(path, ".go") {
			return nil
		}
		set := token.NewFileSet()
		file, err := parser.ParseFile(set, path, nil, parser.SkipObjectResolution)
		list = append(list, source{filepath.ToSlash(strings.TrimPrefix(path, "../")), file, set})
		return err
	})
	require.NoError(t, err)
	require.NotEmpty(t, list)
	return list
}

func TestOnlyCapiUsesCgo(t *testing.T) {
	for _, s := range sources(t) {
		require.False(t, s.imports("C") && !strings.HasPrefix(s.path, "capi/"), s.path)
		require.False(t, s.imports("os/signal"), "%s: os/signal takes Ctrl-C away from Python", s.path)
	}
}

// Hosts have different clocks, and that of a host may jump: what is told or kept are durations.
func TestNobodyReadsTheTimeOfDay(t *testing.T) {
	reads := []string{"Unix", "UnixNano", "UnixMicro", "UnixMilli"}
	times := 0
	for _, s := range sources(t) {
		if strings.HasSuffix(s.path, "_test.go") || !s.imports("time") {
			continue
		}
		times++
		ast.Inspect(s.file, func(n ast.Node) bool {
			if call, ok := n.(*ast.CallExpr); ok {
				of, isMethod := call.Fun.(*ast.SelectorExpr)
				require.False(t, isMethod && len(call.Args) == 0 && slices.Contains(reads, of.Sel.Name), "%s", s.set.Position(n.Pos()))
			}
			return true
		})
	}
	require.NotZero(t, times, "the scan finds who uses time")
}

// A panic ends the process unless its own goroutine recovers it.
func TestGoroutinesStartThroughGuard(t *testing.T) {
	tests := map[string]bool{}
	list := sources(t)
	for _, s := range list {
		if s.imports("testing") && !strings.HasSuffix(s.path, "_test.go") {
			tests[filepath.Dir(s.path)] = true
		}
	}
	inGuard := 0
	for _, s := range list {
		folder := filepath.Dir(s.path)
		switch {
		case strings.HasSuffix(s.path, "_test.go") || tests[folder]:
		case folder == "core/guard":
			inGuard += len(s.bareGo())
		default:
			require.Empty(t, s.bareGo(), "start it with guard.Go")
		}
	}
	require.Equal(t, 1, inGuard, "the scan finds go statements")
}
