// A program that makes its system calls itself. `serve` echoes; `talk PORT` checks what comes back, over several
// connections at once.
package main

import (
	"bytes"
	"fmt"
	"io"
	"math/rand"
	"net"
	"os"
	"sync"
)

const connections, size = 8, 5_000_000

func check(err error) {
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func serve() {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	check(err)
	fmt.Println("port", listener.Addr().(*net.TCPAddr).Port)
	for range [connections]int{} {
		conn, err := listener.Accept()
		check(err)
		go func() {
			_, err := io.Copy(conn, conn)
			check(err)
			check(conn.(*net.TCPConn).CloseWrite())
		}()
	}
	// The harness ends it.
	io.Copy(io.Discard, os.Stdin)
}

func talk(port string) {
	var all sync.WaitGroup
	for i := range [connections]int{} {
		all.Add(1)
		go func(seed int64) {
			defer all.Done()
			sent := make([]byte, size)
			rand.New(rand.NewSource(seed)).Read(sent)
			conn, err := net.Dial("tcp", "127.0.0.1:"+port)
			check(err)
			go func() {
				_, err := conn.Write(sent)
				check(err)
				check(conn.(*net.TCPConn).CloseWrite())
			}()
			got, err := io.ReadAll(conn)
			check(err)
			if !bytes.Equal(sent, got) {
				check(fmt.Errorf("%d bytes came back, and differ", len(got)))
			}
		}(int64(i))
	}
	all.Wait()
	fmt.Println("all well")
}

func main() {
	if os.Args[1] == "serve" {
		serve()
	} else {
		talk(os.Args[2])
	}
}
